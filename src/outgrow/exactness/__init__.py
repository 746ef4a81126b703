"""What may new units and blocks hold, so that nothing changes?"""
