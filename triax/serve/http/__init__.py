"""The server's face: the OpenAI API over one engine."""
