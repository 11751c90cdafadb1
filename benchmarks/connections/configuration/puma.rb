# A receiver on Puma.
bind "tcp://127.0.0.1:@port@"
threads 8, 8
persistent_timeout 1
app { |env| env["rack.input"].read; [200, { "content-length" => "2" }, ["ok"]] }
quiet
