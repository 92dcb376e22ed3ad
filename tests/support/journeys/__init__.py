"""What docs/life-of-a-request.md shows: `request` traces the modules that a request enters, and
`agent` the messages of a chat over two workers. ``python -m tests.support.journeys --write``
updates the page."""
