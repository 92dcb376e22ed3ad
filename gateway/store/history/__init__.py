"""What models were asked and what they answered: stored responses, and the conversations to which
they add their items.

`responses.Responses` and `conversations.Conversations` are the operations on each, and
`room.TenantRoom` is what a tenant may store of both.
"""
