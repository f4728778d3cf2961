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
