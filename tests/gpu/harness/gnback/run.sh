#!/bin/bash
chmod +x ./bench 2>/dev/null
timeout -k 2 35 ./bench || echo "bench exit $?"
