"""The requests to models and their answers: stored responses, the conversations to which they add
their items, and how answers compare with another model's.

`responses.Responses`, `conversations.Conversations` and `replays.Replays` are the operations on
each, and `room.TenantRoom` limits the size of the first two for each tenant.
"""
