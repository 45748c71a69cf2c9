"""The real vLLM by itself, in the environment of tests/environments/vllm.txt."""
