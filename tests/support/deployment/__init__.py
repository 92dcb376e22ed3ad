"""What runs outside of the tests: RabbitMQ, PostgreSQL, Chromium, Warren's processes, and the Helm
chart. `command` runs the command line inside of them, and `forking` starts processes quickly."""
