// A receiver on Tomcat.
import jakarta.servlet.http.HttpServlet;
import jakarta.servlet.http.HttpServletRequest;
import jakarta.servlet.http.HttpServletResponse;
import org.apache.catalina.Context;

public class Tomcat {
    public static void main(String[] words) throws Exception {
        org.apache.catalina.startup.Tomcat tomcat = new org.apache.catalina.startup.Tomcat();
        tomcat.setBaseDir(words[1]);
        tomcat.setHostname("127.0.0.1");
        tomcat.setPort(Integer.parseInt(words[0]));
        tomcat.getConnector().setProperty("address", "127.0.0.1");
        tomcat.getConnector().setProperty("keepAliveTimeout", "1000");
        tomcat.getConnector().setProperty("maxKeepAliveRequests", "-1");
        Context context = tomcat.addContext("", words[1]);
        org.apache.catalina.startup.Tomcat.addServlet(context, "receiver", new HttpServlet() {
            @Override
            protected void doPost(HttpServletRequest request, HttpServletResponse response)
                    throws java.io.IOException {
                request.getInputStream().readAllBytes();
                response.setContentLength(2);
                response.getOutputStream().print("ok");
            }
        });
        context.addServletMappingDecoded("/*", "receiver");
        tomcat.start();
        tomcat.getServer().await();
    }
}
