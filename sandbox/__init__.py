"""A jailed Python for tool calls. Light to import: neither torch nor vllm."""
