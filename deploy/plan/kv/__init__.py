"""`prfaas plan kv`: KVCache sizes of a model."""
