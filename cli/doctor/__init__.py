"""``warren doctor``: checks a deployment, one `findings.Finding` for each check.

`command` defines the command and checks this machine, `broker` the broker, and `gateway` a gateway.
"""
