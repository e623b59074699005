"""Times and profiles real training steps by component: the measurements that forecasts are validated on."""
