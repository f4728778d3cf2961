"""The clients that are tried, each with its packages; recipes/agents.md has a table of them."""

FRAMEWORKS = {
    "openai and anthropic": ("openai==3.57.0", "anthropic==2.14.0"),
    "openai-agents": ("openai-agents==0.24.0",),
    "pydantic-ai": ("pydantic-ai-slim[openai,anthropic]==2.68.0",),
    "langgraph": ("langgraph==1.2.24", "langchain==1.5.2", "langchain-openai==1.7.4", "langchain-anthropic==1.7.10"),
    "smolagents": ("smolagents[openai]==1.26.0",),
    "instructor": ("instructor[anthropic]==1.17.0",),
    "litellm": ("litellm==1.110.2",),
    "dspy": ("dspy==3.4.1",),
    "inspect-ai": ("inspect-ai==0.3.285", "openai==3.57.0", "anthropic==2.14.0"),
}

PROGRAMS = {
    "Claude Code": ("@anthropic-ai/claude-code@2.1.332",),
    "Codex": ("@openai/codex@0.171.0",),
    "Qwen Code": ("@qwen-code/qwen-code@0.24.4",),
    "Mistral Vibe": ("mistral-vibe==3.0.2",),
    "mini-swe-agent": ("mini-swe-agent==2.4.6",),
    "aider": ("aider-chat==0.86.2",),
    "AI SDK": ("ai@7.0.173", "@ai-sdk/openai-compatible@3.0.92", "@ai-sdk/openai@4.0.118", "@ai-sdk/anthropic@4.0.105"),
}
"""Those that are no Python packages of frameworks: `name@version` comes from npm, `name==version` from PyPI."""
