// A receiver on Jetty.
import javax.servlet.http.HttpServletRequest;
import javax.servlet.http.HttpServletResponse;
import org.eclipse.jetty.server.Request;
import org.eclipse.jetty.server.Server;
import org.eclipse.jetty.server.ServerConnector;
import org.eclipse.jetty.server.handler.AbstractHandler;

public class Jetty {
    public static void main(String[] words) throws Exception {
        Server server = new Server();
        ServerConnector connector = new ServerConnector(server);
        connector.setHost("127.0.0.1");
        connector.setPort(Integer.parseInt(words[0]));
        connector.setIdleTimeout(1000);
        server.addConnector(connector);
        server.setHandler(new AbstractHandler() {
            @Override
            public void handle(String target, Request base, HttpServletRequest request,
                    HttpServletResponse response) throws java.io.IOException {
                request.getInputStream().readAllBytes();
                response.setContentLength(2);
                response.getOutputStream().print("ok");
                base.setHandled(true);
            }
        });
        server.start();
        server.join();
    }
}
