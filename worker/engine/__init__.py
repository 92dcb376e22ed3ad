"""The engine decides which tokens are computed next. It imports no torch or asyncio and handles no
text.

`engine.Engine` takes commands and runs steps, and `driver.EngineThread` runs it in a thread of its
own. `interface` has the commands, the outputs, and the protocol of a model runner, which
`worker.model` implements. `step_times` and `scheduler.SchedulerLimits` are for metrics and
settings. The other modules are internal.
"""
