"""GRPO-RoC: rewards, selection, advantages, loss, and the FSDP learner."""
