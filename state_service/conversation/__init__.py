"""The story of one conversation's turns: the order of hot and cold writes, stated once.

begin → (open node | flush | register write | settle calls)* → persist. Redis first, SQL second, at
every write point (state document 1.3); what a crash leaves between the two is in the dirty set.
"""
