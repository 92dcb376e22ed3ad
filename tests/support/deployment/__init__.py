"""What runs outside of the tests: RabbitMQ, PostgreSQL, Warren's processes, and the Helm chart."""
