"""``warren doctor``: checks a deployment, one `findings.Finding` for each check.

`command` defines the command and checks this machine and a gateway; `broker` checks the broker.
"""
