"""OpenAI's Responses: bodies become chats, answers become items, and responses are kept in Redis."""
