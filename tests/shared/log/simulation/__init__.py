"""One request among workers, gateways and a broker that fail at random: the real runs and readers
of a log, without clock or socket, one seed a schedule."""
