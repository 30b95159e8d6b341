"""Which statistics the policy normalizes by: the teacher's, the new data's, or both."""
