#!/bin/bash
awk '{s += $2} END {print s}' /app/stock.txt > /app/answer.txt
