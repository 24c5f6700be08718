"""Classes of transformers and torch whose forward looks at the batch, taught ours one by one."""
