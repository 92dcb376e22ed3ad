"""People who sign in: `provider` is an OpenID provider, `fixtures` has a gateway that knows it."""
