"""`llmobs generate`: from the SLO to alert rules, configuration and dashboards."""
