"""One sequence shared by several ranks: context parallelism on torch.distributed. `plan` once, then `attention`."""

from .context_plan import ContextPlan, plan
from .functional import attention, attention_with_lse

__all__ = ["ContextPlan", "attention", "attention_with_lse", "plan"]
