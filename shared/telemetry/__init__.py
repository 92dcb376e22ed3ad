"""What a process reports about itself: log lines, metrics, spans, incidents and the audit log.

`setup.configure` is called once in each process. A module imports the part that it reports with:
`requests`, `incidents`, `audit`, or the catalog in `metrics`.
"""
