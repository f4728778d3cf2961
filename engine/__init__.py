"""The asyncio engine: pipeline runtime, rollouts, fleet of replicas, link to the learner."""
