"""From prompts to graded groups, and from groups to samples; sees engines, envs and graders as Protocols."""
