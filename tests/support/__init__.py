"""What tests share: fakes, builders, live servers.

`deployment` runs brokers, databases and Warren's processes, `gateway` runs gateways and their
clients inside of tests, `workers` are workers and readers of their answers, `models` are small
models and engines, `text` has tokenizers and chat templates, `strictness` compares answers with
OpenAI's types, and `network` breaks connections. `browser` and `console` drive the console, `pages`
reads the documentation, `journey` traces a request through the modules, `metrics` and `spans` read
what was measured, and `otlp` receives what is exported.
"""

PATIENCE_S = 240.0
"""The time for which a test waits for an event, however busy the machine is. It is a little shorter
than the time limit of a test, so that a failure says which event did not come."""
