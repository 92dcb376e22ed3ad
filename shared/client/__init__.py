"""Warren for programs that submit jobs to RabbitMQ without a gateway.

`client.AsyncClient` and `plain.Client` submit jobs and read their answers. `prompts` turns texts,
token ids and conversations into prompts, which programs that run a model themselves use, too.
`replies` is a queue for the answers to many jobs.
"""
