"""What tests share: fakes, builders, live servers.

`deployment` runs brokers, databases and Warren's processes, `gateway` runs gateways and their
clients inside of tests, `workers` are workers and readers of their answers, `models` are small
models and engines, `text` has tokenizers and chat templates, `strictness` compares answers with
OpenAI's types, and `network` breaks connections. `browser` and `console` drive the console, `pages`
reads the documentation, `journey` traces a request through the modules, `metrics` and `spans` read
what was measured, and `otlp` receives what is exported.
"""
