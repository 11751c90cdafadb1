# Reads the body: otherwise lighttpd closes the connection.
cat > /dev/null
printf 'Content-Length: 2\r\n\r\nok'
