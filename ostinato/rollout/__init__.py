"""From prompts to graded groups, and from groups to samples; knows engines, envs and graders as Protocols."""
