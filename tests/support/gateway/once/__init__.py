"""What the gateways of a test process do once instead of at each start: `databases.data_dir` and
`endpoints.analysed_once`."""
