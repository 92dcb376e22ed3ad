"""The engine decides which tokens are computed next. It imports no torch or asyncio and handles no
text."""
