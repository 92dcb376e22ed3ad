"""The work of a gateway's event loop: how long its callbacks take, and which bodies make them
long."""
