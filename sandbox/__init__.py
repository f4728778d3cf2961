"""A jailed Python for tool calls. Light to import: neither torch nor vllm."""

from .client import Sandbox
from .config import SandboxConfig, SandboxUnavailable, Stats
from .session import Session
from .tiers import TIERS, Tier
from .wire import Limits, ToolResult

__all__ = [
    "TIERS",
    "Limits",
    "Sandbox",
    "SandboxConfig",
    "SandboxUnavailable",
    "Session",
    "Stats",
    "Tier",
    "ToolResult",
]
