"""Who lies where: budgets, pools of slots, the books of the cache."""
