"""The requests to models and their answers: stored responses, and the conversations to which they
add their items.

`responses.Responses` and `conversations.Conversations` are the operations on each, and
`room.TenantRoom` limits the size of both for each tenant.
"""
