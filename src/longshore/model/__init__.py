"""The decoder: mixers, feed-forward parts and the blocks that join them. No process group."""
