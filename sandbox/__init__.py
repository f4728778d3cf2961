"""A jailed Python for tool calls. Light to import: neither torch nor vllm."""

from .client import Sandbox, SandboxConfig, SandboxUnavailable
from .wire import Limits, ToolResult

__all__ = ["Limits", "Sandbox", "SandboxConfig", "SandboxUnavailable", "ToolResult"]
