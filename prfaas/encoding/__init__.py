"""The encode stage of a cluster front: has the media of prompts encoded before their prefill."""
