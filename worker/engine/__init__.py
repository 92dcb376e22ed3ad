"""The engine decides which tokens to compute next. No torch, no asyncio, no text in here."""
