"""`tessera doctor`: does everything that several devices need work here? If not, what helps?"""
