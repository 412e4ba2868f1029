"""Context parallelism on torch.distributed: several ranks share one sequence. `plan` once, then `attention`."""

from .context_plan import ContextPlan, plan
from .functional import attention, attention_with_lse
from .nn import SelfAttention

__all__ = ["ContextPlan", "SelfAttention", "attention", "attention_with_lse", "plan"]
