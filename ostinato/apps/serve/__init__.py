"""A policy behind an OpenAI-compatible address: chat, completions, responses and messages (docs/serve.md)."""
