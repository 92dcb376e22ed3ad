"""A whole fleet on virtual time: its traffic, its workers, and the autoscaler of the Helm chart.

`traffic.Traffic` draws requests, `play.play` sends them to a fleet and changes its size as
`autoscaler.Autoscaler` wants, and `books.Books` keeps the figures. There are two fleets. Workers of
`exact.ExactFleet` are the product's engines and windows; workers of `coarse.CoarseFleet` are
queueing servers with the same step cost, of which a thousand take minutes of CPU time for a day.
"""
