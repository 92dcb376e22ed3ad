"""The Responses API: other words for a chat."""
