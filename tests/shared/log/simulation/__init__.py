"""One request among workers, gateways and a broker that fail at random, on the rules of
`shared.log` and `shared.log.attempt` and nothing else: no clock, no socket, one seed a schedule."""
