"""The request bodies of all APIs, and the chat that three of the bodies become."""
