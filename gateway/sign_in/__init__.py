"""People sign in with an OpenID provider instead of an API key.

`access` says who may and as what, `provider` asks the provider and verifies its tokens, and
`signing_in.SignIn` gives and checks the sessions of browsers, which `endings` ends early.
"""
