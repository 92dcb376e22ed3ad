"""One request among workers, gateways and a broker that fail at random, on the rules of
`shared.stream` and `shared.attempt` and nothing else: no clock, no socket, one seed a schedule."""
